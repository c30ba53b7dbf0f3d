"""Turns users' files into stores: inspect, read, tokenize, write in parts."""
