"""Operations of layers that keep a state of a fixed size: convolution windows and recurrences over slots."""
