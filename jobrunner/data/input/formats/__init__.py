"""How the formats of input files are read: one file a format, all with one protocol."""
