"""The day a GPU is there: all that is to be measured on one GPU of any kind, by one command, in parts."""
