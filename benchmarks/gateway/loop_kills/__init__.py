"""The learning loop of a Temper whose processes are killed: what it loses, counts twice, promotes without evidence."""
