// The kernels of the overlap benchmark that are not jshard's; CuPy compiles them when it runs.
// DEPTH and HELD say how many registers a thread needs. Times are those of %globaltimer, in nanoseconds.

static __device__ __forceinline__ unsigned long long now() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

static __device__ __forceinline__ unsigned multiprocessor() {
  unsigned id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

#ifdef DEPTH
// What a collective is to the kernels beside it: a few blocks of many threads, registers and shared memory, which stay
// until all is moved. A block copies a chunk of DEPTH words by thread, and begins the next when a link would have
// carried it: `pace_ns` after the one before. The blocks share the buffers, and begin again at their end.
extern "C" __global__ void
comm_like(uint4* __restrict__ to, const uint4* __restrict__ from, unsigned long long words, unsigned long long chunks,
          unsigned long long pace_ns, unsigned long long* __restrict__ times, unsigned* __restrict__ places) {
  const unsigned long long begin = now();
  if (threadIdx.x == 0) {
    times[2 * blockIdx.x] = begin;
    places[blockIdx.x] = multiprocessor();
  }
  const unsigned long long chunk_words = (unsigned long long)DEPTH * blockDim.x;
  const unsigned long long slots = words / chunk_words;
  for (unsigned long long chunk = 0; chunk < chunks; ++chunk) {
    if (threadIdx.x == 0)
      while (now() < begin + chunk * pace_ns) {
      }
    __syncthreads();
    const unsigned long long at = (chunk * gridDim.x + blockIdx.x) % slots * chunk_words + threadIdx.x;
    uint4 moved[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) moved[i] = __ldcs(from + at + (unsigned long long)i * blockDim.x);
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) __stcs(to + at + (unsigned long long)i * blockDim.x, moved[i]);
  }
  __syncthreads();
  if (threadIdx.x == 0) times[2 * blockIdx.x + 1] = now();
}
#endif

#ifdef HELD
// A short block of 128 threads that holds HELD numbers in the registers of each at once: all are read before one is
// written.
extern "C" __global__ void
probe(volatile unsigned* to, const volatile unsigned* from, unsigned long long* __restrict__ times,
      unsigned* __restrict__ places) {
  if (threadIdx.x == 0) {
    times[2 * blockIdx.x] = now();
    places[blockIdx.x] = multiprocessor();
  }
  unsigned held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) held[i] = from[i * 128 + threadIdx.x];
#pragma unroll
  for (int i = 0; i < HELD; ++i) to[i * 128 + threadIdx.x] = held[i];
  __syncthreads();
  if (threadIdx.x == 0) times[2 * blockIdx.x + 1] = now();
}
#endif

// The GPU's clock, to be set beside the host's.
extern "C" __global__ void stamp(unsigned long long* times) { times[0] = now(); }
