"""Tools that write and check the documentation: generated pages, plots, links and the site."""
