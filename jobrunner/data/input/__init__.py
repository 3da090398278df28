"""Where rows come from: files, stores and data sets, in every format. Knows no prompts."""
