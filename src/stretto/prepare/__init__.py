"""Users' files into stores: inspect, read, tokenize, split into parts."""
