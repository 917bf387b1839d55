"""What every layer of the gateway may use: errors, admission, events, metrics."""
