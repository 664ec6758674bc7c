"""A file for each question of the report: a new one needs no other change. Its QUESTION is how it is found."""
