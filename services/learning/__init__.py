"""Learning from traffic: what people say of answers, and what is made of it. No torch."""
