"""/v1/train/sessions: training loops of clients."""
