"""/api/v1: Tinker's API, so that its SDK trains and samples here as it is. A layer over training sessions."""
