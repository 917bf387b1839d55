"""What the Dockerfiles run while they build, and `make images-check`. Nothing of it is in an image."""
