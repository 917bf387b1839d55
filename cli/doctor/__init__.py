"""`temper doctor`: what is wrong with this installation, its stores, its model or its server, and the way out."""
