import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Cases here are tiny: on a busy machine threads that wait for each other would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
