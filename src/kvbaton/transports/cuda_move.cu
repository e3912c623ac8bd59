// Moves many spans of bytes by one launch: block i of the grid copies row i.
//
// A table is numbers of 64 bits: first the groups, six numbers each (first row, target address, source address, where its
// column begins in the table, rows of the column, where its shifts begin), then columns of (target offset, source offset,
// bytes) and shifts of (target offset, source offset). A group has every row of its column at every shift.
//
// Any length and any alignment: what is aligned to 16 goes 16 bytes at a time, two loads of a thread under way at once;
// where target and source lie alike modulo 16 or 4, all but the ragged ends goes by such words; else byte by byte.
// Four blocks of 512 threads on a multiprocessor were the best of some 40 shapes on an H200 (docs/lab/2026-11-15-cuda.md).
// `cuda_ptx.py` is this file, compiled: `python tools/cuda_ptx.py` after a change (a test compares the two).

enum { THREADS = 512, LOADS = 2, GROUP = 6 };

template <typename Word>
__device__ __forceinline__ void copy_words(char* target, const char* source, unsigned words) {
    const Word* from = reinterpret_cast<const Word*>(source);
    Word* to = reinterpret_cast<Word*>(target);
    unsigned at = threadIdx.x;
    for (; at + (LOADS - 1) * THREADS < words; at += LOADS * THREADS) {
        Word held[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) held[i] = from[at + i * THREADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) to[at + i * THREADS] = held[i];
    }
    for (; at < words; at += THREADS) to[at] = from[at];
}

template <typename Word>
__device__ __forceinline__ void copy_ragged(char* target, const char* source, unsigned bytes) {
    unsigned head = (unsigned)(-reinterpret_cast<long long>(target)) & (unsigned)(sizeof(Word) - 1);
    head = head < bytes ? head : bytes;
    const unsigned words = (bytes - head) / sizeof(Word);
    const unsigned tail = bytes - head - words * sizeof(Word);
    copy_words<Word>(target + head, source + head, words);
    if (threadIdx.x < head) target[threadIdx.x] = source[threadIdx.x];
    if (threadIdx.x < tail) target[bytes - tail + threadIdx.x] = source[bytes - tail + threadIdx.x];
}

__device__ __noinline__ void copy_unaligned(char* target, const char* source, unsigned bytes) {
    const unsigned apart = (unsigned)(reinterpret_cast<long long>(target) ^ reinterpret_cast<long long>(source));
    if ((apart & 15) == 0) copy_ragged<uint4>(target, source, bytes);
    else if ((apart & 3) == 0) copy_ragged<unsigned>(target, source, bytes);
    else copy_words<unsigned char>(target, source, bytes);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
kvbaton_move(const long long* __restrict__ table, int group_count) {
    const unsigned index = blockIdx.x;
    int low = 0, high = group_count;  // the last group that begins at or before this row
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table[GROUP * middle] <= (long long)index) low = middle;
        else high = middle;
    }
    const long long* group = table + GROUP * low;
    const unsigned within = index - (unsigned)group[0], count = (unsigned)group[4];
    const unsigned shift_index = within / count;
    const long long* row = table + group[3] + 3 * (within - shift_index * count);
    const long long* shift = table + group[5] + 2 * shift_index;
    char* target = reinterpret_cast<char*>(group[1] + shift[0] + row[0]);
    const char* source = reinterpret_cast<const char*>(group[2] + shift[1] + row[1]);
    const unsigned bytes = (unsigned)row[2];  // a row is short: see cuda_table.py
    const unsigned both = (unsigned)(reinterpret_cast<long long>(target) | reinterpret_cast<long long>(source)) | bytes;
    if ((both & 15) == 0) copy_words<uint4>(target, source, bytes / 16);
    else copy_unaligned(target, source, bytes);
}
