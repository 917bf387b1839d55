"""Fleet simulator: hundreds of engines in one process, in virtual time, behind the gateway's own routing."""
