"""Traffic of a campaign: each part asks for one kind of thing, all the time, and knows what it may be told."""
