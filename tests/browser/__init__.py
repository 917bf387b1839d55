"""The dashboard in a real browser, against the Temper that all tests share."""
