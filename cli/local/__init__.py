"""`temper up`: supervisor, processes, ports, local stores."""
