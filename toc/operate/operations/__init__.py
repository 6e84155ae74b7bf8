"""Operations, a module for each subject."""
