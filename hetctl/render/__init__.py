"""Values to pictures: tables and trees for terminals, pages for browsers. Nothing here decides anything."""
