"""From a parsed request to engine requests and back to text. Knows no HTTP."""
