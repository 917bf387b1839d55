"""Array code without any type of the services; each operation has a plain torch reference."""
