/* Moves byte spans with the GIL released: memory to memory, memory to socket, socket to memory.
 *
 * Law: nothing is touched before it has been range-checked against the buffers that were handed in, without
 * arithmetic that can overflow. Spans are rows of int64: an offset comes first (and, in rows of three, a second
 * offset), the number of bytes last. mover.py holds the same contract in pure Python; the tests run both.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 /* one wheel for CPython 3.11 and later: no macro that knows what an object looks like */
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define CONTRACT 2            /* raise with every change of a signature, together with mover.CONTRACT */
#define PIECE_BYTES (1 << 20) /* the cancel flag is looked at this often: about 70 us of copying */
#define IOVECS_MAX 512        /* per system call; the kernel takes 1024, 256 is already as fast */

static int inside(int64_t offset, int64_t bytes, int64_t size)
{
    return offset >= 0 && bytes >= 0 && bytes <= size && offset <= size - bytes;
}

static void touch(const char *from, char *to)
{
    __builtin_prefetch(from, 0);
    __builtin_prefetch(from + 64, 0);
    __builtin_prefetch(to, 1);
}

/* A view of whole rows; sets an exception and returns -1 when the table is not one. */
static Py_ssize_t get_rows(PyObject *object, Py_buffer *view, Py_ssize_t width)
{
    if (PyObject_GetBuffer(object, view, PyBUF_SIMPLE) < 0)
        return -1;
    if (view->len % (width * 8) == 0 && (view->len == 0 || (uintptr_t)view->buf % 8 == 0))
        return view->len / (width * 8);
    PyErr_Format(PyExc_ValueError, "a span table must be aligned rows of %zd int64, got %zd bytes", width, view->len);
    PyBuffer_Release(view);
    return -1;
}

static PyObject *bad_span(Py_ssize_t index)
{
    return PyErr_Format(PyExc_ValueError, "span %zd is outside its memory", index);
}

/* check_spans(spans, width, local_bytes, remote_bytes) -> bytes named by all spans together */
static PyObject *check_spans(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer table;
    if (nargs != 4)
        return PyErr_Format(PyExc_TypeError, "check_spans takes 4 arguments, got %zd", nargs);
    Py_ssize_t width = PyLong_AsSsize_t(args[1]);
    int64_t local = PyLong_AsLongLong(args[2]), remote = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred())
        return NULL;
    if (width != 2 && width != 3)
        return PyErr_Format(PyExc_ValueError, "rows have 2 or 3 columns, not %zd", width);
    Py_ssize_t count = get_rows(args[0], &table, width);
    if (count < 0)
        return NULL;
    const int64_t *row = table.buf;
    int64_t total = 0;
    Py_ssize_t index = 0;
    for (; index < count; index++, row += width) {
        int64_t bytes = row[width - 1];
        if (!inside(row[0], bytes, local) || (width == 3 && !inside(row[1], bytes, remote)) ||
            bytes > INT64_MAX - total)
            break;
        total += bytes;
    }
    PyBuffer_Release(&table);
    return index < count ? bad_span(index) : PyLong_FromLongLong(total);
}

struct pages {
    Py_buffer bands, counts;
    Py_ssize_t rows, blocks, last; /* `last`: the band that was found before, where the next is likely too */
};

/* The band of (start, end, stride, extent) rows that `at` lies in, or NULL. */
static const int64_t *band_of(struct pages *table, int64_t at)
{
    const int64_t *bands = table->bands.buf, *found = bands + 4 * table->last;
    if (at >= found[0] && at < found[1])
        return found;
    Py_ssize_t low = 0, high = table->rows; /* the first whose start is beyond `at` */
    while (low < high) {
        Py_ssize_t middle = low + (high - low) / 2;
        if (bands[4 * middle] <= at)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == 0 || at >= bands[4 * (low - 1) + 1])
        return NULL;
    table->last = low - 1;
    return bands + 4 * table->last;
}

static int touchable(struct pages *table, int64_t at, int64_t bytes)
{
    const int32_t *counts = table->counts.buf;
    while (bytes > 0) {
        const int64_t *band = band_of(table, at);
        if (!band)
            return 0;
        int64_t block = (at - band[0]) / band[2], left = band[3] - (at - band[0]) % band[2];
        if (left <= 0 || block >= table->blocks || !counts[block])
            return 0;
        at += left;
        bytes -= left;
    }
    return 1;
}

/* Fills `table` from a pair of buffers; sets an exception and returns -1 when it is not one of bands and counts. */
static int get_pages(PyObject *pair, struct pages *table)
{
    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "tables are pairs of bands and counts");
        return -1;
    }
    if ((table->rows = get_rows(PyTuple_GetItem(pair, 0), &table->bands, 4)) < 0)
        return -1;
    if (PyObject_GetBuffer(PyTuple_GetItem(pair, 1), &table->counts, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&table->bands);
        return -1;
    }
    table->blocks = table->counts.len / 4;
    table->last = 0;
    const int64_t *band = table->bands.buf;
    int good = table->rows > 0 && (uintptr_t)table->counts.buf % 4 == 0;
    for (Py_ssize_t index = 0; good && index < table->rows; index++, band += 4)
        good = band[0] >= 0 && band[1] >= band[0] && band[2] > 0 && band[3] > 0;
    if (good)
        return 0;
    PyErr_SetString(PyExc_ValueError, "bands must have a start, an end, a stride and an extent above 0");
    PyBuffer_Release(&table->bands);
    PyBuffer_Release(&table->counts);
    return -1;
}

/* check_pages(spans, width, tables) -> whether every byte of every span lies in a block whose count is not 0 */
static PyObject *check_pages(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    enum { TABLES_MAX = 256 };
    struct pages tables[TABLES_MAX];
    Py_buffer spans;
    if (nargs != 3)
        return PyErr_Format(PyExc_TypeError, "check_pages takes 3 arguments, got %zd", nargs);
    Py_ssize_t width = PyLong_AsSsize_t(args[1]), used = 0;
    if (PyErr_Occurred())
        return NULL;
    if (width != 2 && width != 3)
        return PyErr_Format(PyExc_ValueError, "rows have 2 or 3 columns, not %zd", width);
    if (!PyList_Check(args[2]) || PyList_Size(args[2]) > TABLES_MAX)
        return PyErr_Format(PyExc_ValueError, "tables must be a list of at most %d", TABLES_MAX);
    Py_ssize_t count = get_rows(args[0], &spans, width), wanted = PyList_Size(args[2]);
    if (count < 0)
        return NULL;
    while (used < wanted && get_pages(PyList_GetItem(args[2], used), &tables[used]) == 0)
        used++;
    int good = used == wanted;
    if (good) {
        Py_ssize_t hint = 0; /* the table that the span before was found in */
        const int64_t *row = spans.buf;
        for (Py_ssize_t index = 0; good && index < count; index++, row += width) {
            int64_t bytes = row[width - 1];
            if (bytes == 0)
                continue;
            good = used > 0 && touchable(&tables[hint], row[0], bytes);
            for (Py_ssize_t other = 0; !good && other < used; other++)
                if (other != hint && touchable(&tables[other], row[0], bytes)) {
                    hint = other;
                    good = 1;
                }
        }
    }
    for (Py_ssize_t index = 0; index < used; index++) {
        PyBuffer_Release(&tables[index].bands);
        PyBuffer_Release(&tables[index].counts);
    }
    PyBuffer_Release(&spans);
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(good);
}

static Py_ssize_t copy_rows(char *target, const char *source, const int64_t *row, Py_ssize_t count, int swap,
                            const unsigned char *cancel)
{
    for (Py_ssize_t done = 0; done < count; done++, row += 3) {
        char *to = target + row[swap];
        const char *from = source + row[!swap];
        if (done + 1 < count)
            touch(source + row[3 + !swap], target + row[3 + swap]);
        for (int64_t left = row[2]; left > 0; left -= PIECE_BYTES, to += PIECE_BYTES, from += PIECE_BYTES) {
            if (__atomic_load_n(cancel, __ATOMIC_RELAXED))
                return done;
            memmove(to, from, left < PIECE_BYTES ? left : PIECE_BYTES);
        }
    }
    return count;
}

/* copy_spans(target, source, spans, swap, start, count, cancel) -> spans done; fewer than count when cancelled */
static PyObject *copy_spans(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer target = {0}, source = {0}, table = {0}, cancel = {0};
    PyObject *result = NULL;
    if (nargs != 7)
        return PyErr_Format(PyExc_TypeError, "copy_spans takes 7 arguments, got %zd", nargs);
    int swap = PyObject_IsTrue(args[3]);
    Py_ssize_t start = PyLong_AsSsize_t(args[4]), count = PyLong_AsSsize_t(args[5]), rows;
    if (PyErr_Occurred())
        return NULL;
    if (PyObject_GetBuffer(args[0], &target, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(args[1], &source, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(args[6], &cancel, PyBUF_SIMPLE) < 0 || (rows = get_rows(args[2], &table, 3)) < 0)
        goto out;
    if (cancel.len != 1 || start < 0 || count < 0 || count > rows || start > rows - count) {
        PyErr_Format(PyExc_ValueError, "spans %zd+%zd of %zd, cancel flag of %zd bytes", start, count, rows, cancel.len);
        goto out;
    }
    const int64_t *first = (const int64_t *)table.buf + 3 * start;
    for (Py_ssize_t index = 0; index < count; index++) {
        const int64_t *row = first + 3 * index;
        if (!inside(row[swap], row[2], target.len) || !inside(row[!swap], row[2], source.len)) {
            bad_span(start + index);
            goto out;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    count = copy_rows(target.buf, source.buf, first, count, swap, cancel.buf);
    Py_END_ALLOW_THREADS
    result = PyLong_FromSsize_t(count);
out:
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    PyBuffer_Release(&table);
    PyBuffer_Release(&cancel);
    return result;
}

struct cursor {
    const int64_t *rows;
    Py_ssize_t width, count, index;
    int64_t skip, size;
};

/* Fills `out` from the cursor on, up to `room` bytes; the number of vectors, or -1 for a span out of range. */
static int gather(const struct cursor *at, char *base, int64_t room, struct iovec *out, int64_t *bytes)
{
    int64_t skip = at->skip;
    int used = 0;
    *bytes = 0;
    for (Py_ssize_t index = at->index; index < at->count && used < IOVECS_MAX && *bytes < room; index++, skip = 0) {
        const int64_t *row = at->rows + index * at->width;
        if (!inside(row[0], row[at->width - 1], at->size) || skip > row[at->width - 1])
            return -1; /* before anything is computed of them: they may be any numbers */
        int64_t left = row[at->width - 1] - skip;
        if (left == 0)
            continue;
        if (left > room - *bytes)
            left = room - *bytes;
        out[used++] = (struct iovec){base + row[0] + skip, left};
        *bytes += left;
    }
    return used;
}

static void advance(struct cursor *at, int64_t bytes)
{
    while (at->index < at->count) {
        int64_t left = at->rows[at->index * at->width + at->width - 1] - at->skip;
        if (bytes < left) {
            at->skip += bytes;
            return;
        }
        bytes -= left;
        at->index++;
        at->skip = 0;
    }
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Whether the socket can go on within the time, and nothing else on the loop (its epoll descriptor) is due first. */
static int may_go_on(int fd, int sending, int loop_fd, int64_t left_ms)
{
    struct pollfd polled[2] = {{fd, sending ? POLLOUT : POLLIN, 0}, {loop_fd, POLLIN, 0}};
    return left_ms > 0 && poll(polled, 2, (int)left_ms) > 0 && polled[0].revents;
}

/* Until the room or the time is used, the spans are done, or the socket has no more and others are due.
 * The bytes moved; 0 at end of stream; -1 with errno (ERANGE: a bad span). */
static int64_t stream_rows(int fd, char *base, struct cursor *at, int64_t room, int sending, int loop_fd, int wait_ms)
{
    struct iovec vectors[IOVECS_MAX];
    int64_t moved = 0, wanted, end_ms = wait_ms > 0 ? now_ms() + wait_ms : 0;
    while (moved < room) {
        int used = gather(at, base, room - moved, vectors, &wanted);
        if (used < 0) {
            errno = ERANGE;
            return -1;
        }
        if (used == 0)
            break;
        struct msghdr message = {.msg_iov = vectors, .msg_iovlen = used};
        ssize_t got = sending ? sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL)
                              : recvmsg(fd, &message, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno != EAGAIN)
            return -1; /* even if some bytes moved: the kernel tells a connection's end only once */
        if (got == 0)
            return moved;
        if (got > 0) {
            moved += got;
            advance(at, got);
        }
        int64_t left_ms = end_ms ? end_ms - now_ms() : 0;
        if (got == wanted ? end_ms && left_ms <= 0 : moved >= room || !may_go_on(fd, sending, loop_fd, left_ms))
            break;
    }
    if (moved == 0 && room > 0 && at->index < at->count) {
        errno = EAGAIN;
        return -1;
    }
    return moved;
}

/* stream_spans(fd, memory, spans, width, index, skip, room, sending, loop_fd, wait_ms) -> (index, skip, bytes moved) */
static PyObject *stream_spans(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer memory = {0}, table = {0};
    PyObject *result = NULL;
    if (nargs != 10)
        return PyErr_Format(PyExc_TypeError, "stream_spans takes 10 arguments, got %zd", nargs);
    int fd = (int)PyLong_AsLong(args[0]), sending = PyObject_IsTrue(args[7]), saved;
    int loop_fd = (int)PyLong_AsLong(args[8]), wait_ms = (int)PyLong_AsLong(args[9]);
    struct cursor at = {.width = PyLong_AsSsize_t(args[3]), .index = PyLong_AsSsize_t(args[4]),
                        .skip = PyLong_AsLongLong(args[5])};
    int64_t room = PyLong_AsLongLong(args[6]), moved;
    if (PyErr_Occurred())
        return NULL;
    if (at.width != 2 && at.width != 3)
        return PyErr_Format(PyExc_ValueError, "rows have 2 or 3 columns, not %zd", at.width);
    if (PyObject_GetBuffer(args[1], &memory, sending ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0 ||
        (at.count = get_rows(args[2], &table, at.width)) < 0)
        goto out;
    at.rows = table.buf;
    at.size = memory.len;
    if (at.index < 0 || at.skip < 0 || room < 0) {
        PyErr_SetString(PyExc_ValueError, "index, skip and room are not negative");
        goto out;
    }
    Py_BEGIN_ALLOW_THREADS
    moved = stream_rows(fd, memory.buf, &at, room, sending, loop_fd, wait_ms);
    saved = errno;
    Py_END_ALLOW_THREADS
    errno = saved;
    if (moved >= 0)
        result = Py_BuildValue("nLL", at.index, (long long)at.skip, (long long)moved);
    else if (saved == ERANGE)
        bad_span(at.index);
    else
        PyErr_SetFromErrno(PyExc_OSError);
out:
    PyBuffer_Release(&memory);
    PyBuffer_Release(&table);
    return result;
}

static PyMethodDef methods[] = {
    {"check_spans", (PyCFunction)(void (*)(void))check_spans, METH_FASTCALL, "Range-check every row."},
    {"check_pages", (PyCFunction)(void (*)(void))check_pages, METH_FASTCALL, "Ask whether rows lie in blocks on loan."},
    {"copy_spans", (PyCFunction)(void (*)(void))copy_spans, METH_FASTCALL, "Copy rows between two buffers."},
    {"stream_spans", (PyCFunction)(void (*)(void))stream_spans, METH_FASTCALL, "Move rows to or from a socket."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_mover", "See the head of _mover.c.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__mover(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "CONTRACT", CONTRACT) < 0)
        Py_CLEAR(made);
    return made;
}
