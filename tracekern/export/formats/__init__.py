"""A file for each format that export() writes: a new one needs no other change. Its FORMAT is how it is found."""
