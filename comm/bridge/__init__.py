"""Between islands: lanes of slots over shared memory, TCP or RDMA, and which of them a pair of ranks takes."""
