"""Every GPU kernel at the shape of the 4B model beside the ceilings of the card."""
