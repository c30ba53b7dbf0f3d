"""The run: optimizer, the loop as an iterator of reports, evaluation, the run's folder."""
