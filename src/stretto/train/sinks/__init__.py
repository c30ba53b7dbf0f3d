"""Where the lines of a run's log go besides the log: one module for each tool."""
