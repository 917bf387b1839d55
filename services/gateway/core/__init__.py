"""Base layer of the gateway, which every other may use: errors, admission, events, metrics."""
