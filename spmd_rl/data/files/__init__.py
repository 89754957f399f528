"""Records of files and of data set folders."""
