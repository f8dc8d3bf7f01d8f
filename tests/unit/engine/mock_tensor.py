"""What tests of the engine copy: addresses on the mock's device, where no memory is."""

PAGE = 4096


class Tensor:
    """An address on the mock's device."""

    count = 0

    def __init__(self, pages: int = 1) -> None:
        Tensor.count += 100
        self.ptr, self.nbytes = (1 << 60) + Tensor.count * PAGE, pages * PAGE
