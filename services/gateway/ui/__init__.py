"""Dashboard: static pages that ask the public API. Nothing is built; the browser loads the modules as they lie here."""
