"""`temper agent` and `temper run`: a model that works with tools in one directory."""
