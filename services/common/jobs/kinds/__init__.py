"""The specification of each kind of job."""
