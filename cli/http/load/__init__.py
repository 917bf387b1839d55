"""A load of a chosen shape on any server with OpenAI's API: streams on bare sockets, their starts, their figures."""
