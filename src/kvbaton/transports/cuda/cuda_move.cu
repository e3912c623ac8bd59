// Moves many spans of bytes, or digests them, by one launch: a team of threads takes a row, then the next but some.
//
// A table is numbers of 64 bits: first the groups, six numbers each (first row, target address, source address, where its
// column begins in the table, rows of the column, where its shifts begin), then columns of (target offset, source offset,
// bytes) and shifts of (target offset, source offset). A group has every row of its column at every shift.
//
// A launch takes the rows from `first` to `end` with as many blocks as its caller lets it have, however many rows there
// are. A block has 1,024 threads, so that it has a multiprocessor nearly to itself: few blocks leave all others free,
// registers and all, which a kernel that needs a whole one (as matrix products do on Hopper) could not get beside small
// blocks on every one of them.
//
// Copies, of any length and any alignment: what is aligned to 16 goes 16 bytes at a time, several loads of a thread under
// way at once; where target and source lie alike modulo 16 or 4, all but the ragged ends goes by such words; else byte by
// byte. Digests: see checksum_device.py, which says what they are and computes the same.
// `cuda_move.ptx` is this file, compiled: `python tools/cuda_ptx.py` after a change (a test compares the two).

#ifndef TEAM
#define TEAM 128
#endif
#ifndef LOADS
#define LOADS 4
#endif
enum { THREADS = 1024, GROUP = 6, WARP = 32 };

struct Row {
    char* target;
    const char* source;
    unsigned bytes;  // a row is short: see cuda_table.py
};

__device__ __forceinline__ Row row_of(const long long* __restrict__ table, int group_count, unsigned index) {
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
    Row found;
    found.target = reinterpret_cast<char*>(group[1] + shift[0] + row[0]);
    found.source = reinterpret_cast<const char*>(group[2] + shift[1] + row[1]);
    found.bytes = (unsigned)row[2];
    return found;
}

// --- copies: a team of TEAM threads

template <typename Word>
__device__ __forceinline__ void copy_words(char* target, const char* source, unsigned words) {
    const Word* from = reinterpret_cast<const Word*>(source);
    Word* to = reinterpret_cast<Word*>(target);
    unsigned at = threadIdx.x % TEAM;
    for (; at + (LOADS - 1) * TEAM < words; at += LOADS * TEAM) {
        Word held[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) held[i] = from[at + i * TEAM];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) to[at + i * TEAM] = held[i];
    }
    for (; at < words; at += TEAM) to[at] = from[at];
}

template <typename Word>
__device__ __forceinline__ void copy_ragged(char* target, const char* source, unsigned bytes) {
    const unsigned me = threadIdx.x % TEAM;
    unsigned head = (unsigned)(-reinterpret_cast<long long>(target)) & (unsigned)(sizeof(Word) - 1);
    head = head < bytes ? head : bytes;
    const unsigned words = (bytes - head) / sizeof(Word);
    const unsigned tail = bytes - head - words * sizeof(Word);
    copy_words<Word>(target + head, source + head, words);
    if (me < head) target[me] = source[me];
    if (me < tail) target[bytes - tail + me] = source[bytes - tail + me];
}

__device__ __noinline__ void copy_unaligned(char* target, const char* source, unsigned bytes) {
    const unsigned apart = (unsigned)(reinterpret_cast<long long>(target) ^ reinterpret_cast<long long>(source));
    if ((apart & 15) == 0) copy_ragged<uint4>(target, source, bytes);
    else if ((apart & 3) == 0) copy_ragged<unsigned>(target, source, bytes);
    else copy_words<unsigned char>(target, source, bytes);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
kvbaton_move(const long long* __restrict__ table, int group_count, unsigned first, unsigned end) {
    const unsigned step = gridDim.x * (THREADS / TEAM);
    for (unsigned index = first + threadIdx.x / TEAM * gridDim.x + blockIdx.x; index < end; index += step) {
        const Row row = row_of(table, group_count, index);
        const long long target = reinterpret_cast<long long>(row.target), source = reinterpret_cast<long long>(row.source);
        if ((((unsigned)(target | source) | row.bytes) & 15) == 0) copy_words<uint4>(row.target, row.source, row.bytes / 16);
        else copy_unaligned(row.target, row.source, row.bytes);
    }
}

// --- digests: a warp

typedef unsigned long long Wide;

#define WEYL 0x9E3779B97F4A7C15ull

__device__ __forceinline__ Wide mixed(Wide word, Wide key) {
    word ^= key;
    word ^= word >> 32;
    word *= 0xBF58476D1CE4E5B9ull;
    word ^= word >> 32;
    word *= 0x94D049BB133111EBull;
    return word ^ word >> 32;
}

__device__ __forceinline__ Wide key_of(unsigned index) { return (Wide)(index + 1) * WEYL; }

__device__ __forceinline__ Wide wide_of(unsigned low, unsigned high) { return (Wide)high << 32 | low; }

__device__ __forceinline__ Wide mixed_pair(uint4 held, unsigned at) {
    const Wide key = key_of(2 * at);
    return mixed(wide_of(held.x, held.y), key) + mixed(wide_of(held.z, held.w), key + WEYL);
}

__device__ __forceinline__ Wide digest_pairs(const char* source, unsigned pairs) {
    const uint4* from = reinterpret_cast<const uint4*>(source);
    Wide sum = 0;
    unsigned at = threadIdx.x % WARP;
    for (; at + 3 * WARP < pairs; at += 4 * WARP) {
        uint4 held[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) held[i] = from[at + i * WARP];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum += mixed_pair(held[i], at + i * WARP);
    }
    for (; at < pairs; at += WARP) sum += mixed_pair(from[at], at);
    return sum;
}

// The words from `begin` on, byte by byte: the ragged end of a row, or all of one that is not aligned.
__device__ __noinline__ Wide digest_bytes(const char* source, unsigned bytes, unsigned begin) {
    Wide sum = 0;
    for (unsigned at = begin + threadIdx.x % WARP; at < (bytes + 7) / 8; at += WARP) {
        const unsigned here = bytes - 8 * at < 8 ? bytes - 8 * at : 8;
        Wide word = 0;
        for (unsigned i = 0; i < here; ++i) word |= (Wide)(unsigned char)source[8 * at + i] << (8 * i);
        sum += mixed(word, key_of(at));
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
kvbaton_digest(const long long* __restrict__ table, int group_count, unsigned first, unsigned end) {
    const unsigned step = gridDim.x * (THREADS / WARP);
    for (unsigned index = first + threadIdx.x / WARP * gridDim.x + blockIdx.x; index < end; index += step) {
        const Row row = row_of(table, group_count, index);
        const unsigned pairs = (reinterpret_cast<long long>(row.source) & 15) == 0 ? row.bytes / 16 : 0;
        Wide sum = digest_pairs(row.source, pairs);
        if (16 * pairs < row.bytes) sum += digest_bytes(row.source, row.bytes, 2 * pairs);
        for (int away = WARP / 2; away; away /= 2) sum += __shfl_down_sync(0xffffffffu, sum, away);
        if (threadIdx.x % WARP == 0) *reinterpret_cast<Wide*>(row.target) = sum + row.bytes;
    }
}
