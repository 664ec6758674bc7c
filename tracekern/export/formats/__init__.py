"""A file for each format that save() writes: a new one needs no other change. Its FORMAT is how it is found."""
