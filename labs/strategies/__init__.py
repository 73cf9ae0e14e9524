"""The same model and data under several ways to divide the work: a file for each."""
