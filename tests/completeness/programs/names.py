"""Names that the programs and those who read what they write share; imports nothing."""

WHOLE = "the whole process"
