"""What torch says of this machine, for `temper doctor`: driver, card, memory plan, and a kernel that is tried."""
