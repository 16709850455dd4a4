/* The native engine's binding to Python (stable ABI of 3.11): a batch is one call without the GIL.
 *
 * What moves the bytes is in _engine.h, the checksum in _crc32c.h. posix_store/native.py is the only caller and
 * documents these functions.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <fcntl.h>
#include <structmember.h>

#include "_engine.h"
#include "_table.h"

/* ---- System calls made by a Python object, for tests that inject faults ---- */

struct python_calls {
    PyObject *object;
    PyObject *type, *value, *traceback; /* the first exception that is no OSError */
};

static int64_t python_failed(struct python_calls *python) {
    int64_t error = EIO;
    PyObject *type, *value, *traceback;
    int is_os_error = PyErr_ExceptionMatches(PyExc_OSError);
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (is_os_error && value) {
        PyObject *code = PyObject_GetAttrString(value, "errno");
        if (code && PyLong_Check(code) && PyLong_AsLongLong(code) > 0) error = PyLong_AsLongLong(code);
        Py_XDECREF(code);
        PyErr_Clear();
    }
    if (is_os_error || python->type) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
    } else {
        python->type = type, python->value = value, python->traceback = traceback;
    }
    return -error;
}

static int64_t python_result(struct python_calls *python, PyObject *result) {
    int64_t value = result ? PyLong_AsLongLong(result) : -1;
    if (PyErr_Occurred()) value = python_failed(python);
    Py_XDECREF(result);
    return value;
}

static ssize_t python_vectored(void *context, const char *name, int fd, const struct iovec *iov, int count,
                               int64_t offset) {
    PyGILState_STATE state = PyGILState_Ensure();
    struct python_calls *python = context;
    PyObject *result = PyObject_CallMethod(python->object, name, "iniL", fd, (Py_ssize_t)(intptr_t)iov, count,
                                           (long long)offset);
    ssize_t moved = (ssize_t)python_result(python, result);
    PyGILState_Release(state);
    return moved;
}

static ssize_t python_preadv(void *context, int fd, const struct iovec *iov, int count, int64_t offset) {
    return python_vectored(context, "preadv", fd, iov, count, offset);
}

static ssize_t python_pwritev(void *context, int fd, const struct iovec *iov, int count, int64_t offset) {
    return python_vectored(context, "pwritev", fd, iov, count, offset);
}

static ssize_t python_pwrite(void *context, int fd, const void *data, size_t length, int64_t offset) {
    PyGILState_STATE state = PyGILState_Ensure();
    struct python_calls *python = context;
    PyObject *result = PyObject_CallMethod(python->object, "pwrite", "iy#L", fd, (const char *)data,
                                           (Py_ssize_t)length, (long long)offset);
    ssize_t written = (ssize_t)python_result(python, result);
    PyGILState_Release(state);
    return written;
}

static int64_t python_seek_hole(void *context, int fd, int64_t offset) {
    PyGILState_STATE state = PyGILState_Ensure();
    struct python_calls *python = context;
    int64_t hole =
        python_result(python, PyObject_CallMethod(python->object, "seek_hole", "iL", fd, (long long)offset));
    PyGILState_Release(state);
    return hole;
}

static int64_t python_links(void *context, int fd) {
    PyGILState_STATE state = PyGILState_Ensure();
    struct python_calls *python = context;
    PyObject *status = PyObject_CallMethod(python->object, "fstat", "i", fd);
    int64_t links = python_result(python, status ? PyObject_GetAttrString(status, "st_nlink") : NULL);
    Py_XDECREF(status);
    PyGILState_Release(state);
    return links;
}

/* `object` is None for libc. */
static struct calls calls_of(PyObject *object, struct python_calls *python) {
    memset(python, 0, sizeof *python);
    python->object = object;
    if (object == Py_None) return libc_calls;
    return (struct calls){python_preadv,    python_pwritev, python_pwrite,
                          python_seek_hole, python_links,   python};
}

/* -1 with the exception set if a call raised something that is no OSError. */
static int raised(struct python_calls *python) {
    if (!python->type) return 0;
    PyErr_Restore(python->type, python->value, python->traceback);
    return -1;
}

/* ---- Arguments ---- */

/* The memory of an object as `count` items of `size` bytes. */
static int take_buffer(PyObject *object, Py_buffer *view, Py_ssize_t count, Py_ssize_t size, int writable) {
    if (PyObject_GetBuffer(object, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE)) return -1;
    if (view->len == count * size) return 0;
    PyErr_Format(PyExc_ValueError, "a buffer of %zd bytes where %zd were expected", view->len, count * size);
    PyBuffer_Release(view);
    return -1;
}

static void release_buffers(Py_buffer *views, int count) {
    while (count-- > 0) PyBuffer_Release(views + count);
}

/* ---- Pool and Journal ---- */

static const char POOL[] = "posix_store._native.pool";

static void pool_capsule_freed(PyObject *capsule) {
    struct pool *pool = PyCapsule_GetPointer(capsule, POOL);
    if (pool) pool_close(pool);
}

static PyObject *native_pool(PyObject *module, PyObject *threads) {
    (void)module;
    long count = PyLong_AsLong(threads);
    if (count == -1 && PyErr_Occurred()) return NULL;
    struct pool *pool = pool_new((int)count);
    return pool ? PyCapsule_New(pool, POOL, pool_capsule_freed) : PyErr_NoMemory();
}

typedef struct {
    PyObject_HEAD
    struct journal journal;
} JournalObject;

static PyObject *journal_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int fd;
    long long end;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "iL", &fd, &end)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    JournalObject *self = (JournalObject *)allocate(type, 0);
    if (self) self->journal = (struct journal){end, fd, 0, 0};
    return (PyObject *)self;
}

static void journal_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* append(calls, records, count, deadline) -> errno */
static PyObject *journal_append_method(PyObject *self, PyObject *args) {
    PyObject *object, *records;
    Py_ssize_t count;
    double deadline;
    Py_buffer view;
    struct python_calls python;
    if (!PyArg_ParseTuple(args, "OOnd", &object, &records, &count, &deadline)) return NULL;
    if (take_buffer(records, &view, count, RECORD, 1)) return NULL;
    struct calls calls = calls_of(object, &python);
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = journal_append(&((JournalObject *)self)->journal, &calls, view.buf, count, deadline);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return raised(&python) ? NULL : PyLong_FromLong(error);
}

static PyMethodDef journal_methods[] = {
    {"append", journal_append_method, METH_VARARGS, "append(calls, records, count, deadline) -> errno"},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef journal_members[] = {
    {"end", T_LONGLONG, offsetof(JournalObject, journal.end), 0, "where the next append goes"},
    {"fd", T_INT, offsetof(JournalObject, journal.fd), READONLY, "its file"},
    {"broken", T_INT, offsetof(JournalObject, journal.broken), READONLY, "did an append fail?"},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot journal_slots[] = {
    {Py_tp_new, (void *)journal_new},
    {Py_tp_dealloc, (void *)journal_dealloc},
    {Py_tp_methods, journal_methods},
    {Py_tp_members, journal_members},
    {0, NULL},
};
static PyType_Spec journal_spec = {
    "posix_store._native.Journal", sizeof(JournalObject), 0, Py_TPFLAGS_DEFAULT, journal_slots,
};
static PyObject *journal_type;

/* ---- A batch ---- */

enum { MAX_BATCH_RECORDS = 1 << 16 };
enum { NOT_TRIED = -1, GONE = -2 }; /* what came of publishing, besides an errno */
enum { WRITES = 1, CHECKS = 2, FINDS_HOLES = 4 };

/* Makes a batch of which every block was written visible. */
static int publish(struct batch *b, struct journal *journal, uint8_t *records) {
    for (int64_t i = 0; i < b->count; i++) {
        if (b->status[i] != OK) return NOT_TRIED;
        put_le(records + i * RECORD + 44, b->crc[i], 4);
    }
    int error = journal_append(journal, b->calls, records, b->count, b->deadline);
    if (error) return error;
    /* Others may have deleted the files since the space was reserved. */
    int64_t data = b->calls->links(b->calls->context, b->fds[0]);
    int64_t records_file = b->calls->links(b->calls->context, journal->fd);
    return data == 0 || records_file == 0 ? GONE : 0;
}

/* move(pool, calls, flags, addresses, sizes, fds, offsets, crc, status, piece_bytes, chunk_bytes, deadline,
 *      journal, records) -> (errno, published) */
static PyObject *native_move(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 14) return PyErr_Format(PyExc_TypeError, "move takes 14 arguments, not %zd", nargs);
    struct pool *pool = PyCapsule_GetPointer(args[0], POOL);
    long flags = PyLong_AsLong(args[2]);
    struct batch b = {0};
    b.piece_bytes = PyLong_AsLongLong(args[9]);
    b.chunk_bytes = PyLong_AsLongLong(args[10]);
    b.deadline = PyFloat_AsDouble(args[11]);
    if (PyErr_Occurred()) return NULL;
    int publishes = args[12] != Py_None;
    if (publishes && !PyObject_TypeCheck(args[12], (PyTypeObject *)journal_type))
        return PyErr_Format(PyExc_TypeError, "journal is no Journal");
    Py_ssize_t count = PyObject_Size(args[8]);
    Py_ssize_t components = PyObject_Size(args[4]);
    if (count < 0 || components < 0) return NULL;
    const Py_ssize_t counts[] = {count * components, components, count, count, count, count, count};
    static const Py_ssize_t sizes[] = {8, 8, 4, 8, 4, 1, RECORD};
    PyObject *objects[] = {args[3], args[4], args[5], args[6], args[7], args[8], args[13]};
    Py_buffer views[7];
    int held = 0;
    for (; held < 6 + publishes; held++) {
        if (take_buffer(objects[held], views + held, counts[held], sizes[held], held > 3)) {
            release_buffers(views, held);
            return NULL;
        }
    }
    b.count = count, b.components = components;
    b.addresses = views[0].buf, b.sizes = views[1].buf, b.fds = views[2].buf, b.offsets = views[3].buf;
    b.crc = views[4].buf, b.status = views[5].buf;
    for (Py_ssize_t i = 0; i < components; i++) b.length += b.sizes[i];
    b.writes = !!(flags & WRITES), b.checks = !!(flags & CHECKS), b.finds_holes = !!(flags & FINDS_HOLES);
    struct python_calls python;
    struct calls calls = calls_of(args[1], &python);
    b.calls = &calls;
    int published = NOT_TRIED;
    Py_BEGIN_ALLOW_THREADS
    run_batch(pool, &b);
    if (publishes && count && count <= MAX_BATCH_RECORDS) published = publish(&b, &((JournalObject *)args[12])->journal, views[6].buf);
    Py_END_ALLOW_THREADS
    release_buffers(views, held);
    return raised(&python) ? NULL : Py_BuildValue("ii", b.error, published);
}

/* ---- Checksums ---- */

static PyObject *native_crc32c(PyObject *module, PyObject *args) {
    Py_buffer view;
    unsigned int crc = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*|I", &view, &crc)) return NULL;
    crc = crc32c_update(crc, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(crc);
}

/* record_crcs(records, out): the checksum of the first 60 of every 64 bytes */
static PyObject *native_record_crcs(PyObject *module, PyObject *args) {
    PyObject *records, *result;
    Py_buffer from, to;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &records, &result)) return NULL;
    if (PyObject_GetBuffer(result, &to, PyBUF_WRITABLE)) return NULL;
    if (take_buffer(records, &from, to.len / 4, RECORD, 0)) {
        PyBuffer_Release(&to);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < to.len / 4; i++)
        ((uint32_t *)to.buf)[i] = crc32c_update(0, (const uint8_t *)from.buf + i * RECORD, RECORD - 4);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    Py_RETURN_NONE;
}

static PyObject *native_crc_kind(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return PyUnicode_FromString(crc32c_kind());
}

/* ---- The table of the index ---- */

/* Holds the buffers of slots and rows for one call. */
static int take_table(PyObject *const *args, Py_buffer *views, struct table *t) {
    for (int i = 0; i < 2; i++) {
        if (PyObject_GetBuffer(args[i], views + i, PyBUF_WRITABLE)) {
            release_buffers(views, i);
            return -1;
        }
    }
    Py_ssize_t slots = views[0].len / 4, row = sizeof(struct row);
    *t = (struct table){views[0].buf, views[1].buf, (uint64_t)slots - 1, views[1].len / row};
    if (slots > 0 && !(slots & (slots - 1)) && views[1].len % row == 0) return 0;
    PyErr_SetString(PyExc_ValueError, "rows of another size, or slots that are no power of two");
    release_buffers(views, 2);
    return -1;
}

/* locate(slots, rows, ids, shards, row[, segment, offset, length, crc, last_shard]) */
static PyObject *native_locate(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    static const Py_ssize_t sizes[] = {16, 2, 8, 4, 8, 8, 4, 2};
    Py_buffer views[10];
    struct table table;
    (void)module;
    if (nargs != 5 && nargs != 10) return PyErr_Format(PyExc_TypeError, "locate takes 5 or 10 arguments");
    Py_ssize_t count = PyObject_Size(args[4]);
    if (count < 0 || take_table(args, views, &table)) return NULL;
    for (int i = 2; i < nargs; i++) {
        if (take_buffer(args[i], views + i, count, sizes[i - 2], i > 3)) {
            release_buffers(views, i);
            return NULL;
        }
    }
    if (nargs == 5) {
        table_find(&table, views[2].buf, views[3].buf, count, views[4].buf);
    } else {
        struct found out = {views[4].buf, views[5].buf, views[6].buf, views[7].buf, views[8].buf, views[9].buf};
        table_locate(&table, views[2].buf, views[3].buf, count, out);
    }
    release_buffers(views, (int)nargs);
    Py_RETURN_NONE;
}

/* insert(slots, rows, numbers[, records, segment, when]): with records the rows are filled from them first */
static PyObject *native_insert(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer views[4];
    struct table table;
    int held = 3;
    (void)module;
    if (nargs != 3 && nargs != 6) return PyErr_Format(PyExc_TypeError, "insert takes 3 or 6 arguments");
    if (take_table(args, views, &table)) return NULL;
    if (PyObject_GetBuffer(args[2], views + 2, PyBUF_SIMPLE)) {
        release_buffers(views, 2);
        return NULL;
    }
    Py_ssize_t count = views[2].len / 8;
    if (nargs == 6) {
        long segment = PyLong_AsLong(args[4]);
        double when = PyFloat_AsDouble(args[5]);
        if (PyErr_Occurred() || take_buffer(args[3], views + 3, count, RECORD, 0)) {
            release_buffers(views, 3);
            return NULL;
        }
        rows_from_records(&table, views[2].buf, views[3].buf, count, (int32_t)segment, when);
        held = 4;
    }
    table_insert(&table, views[2].buf, count);
    release_buffers(views, held);
    Py_RETURN_NONE;
}

/* fallocate(fd, mode, offset, length, step) -> (errno, how much): in steps, since each holds up writes to the file */
static PyObject *native_fallocate(PyObject *module, PyObject *args) {
    int fd, mode, error = 0;
    long long offset, length, step, done = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "iiLLL", &fd, &mode, &offset, &length, &step)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    while (done < length && !error) {
        long long size = length - done < step ? length - done : step;
        if (fallocate(fd, mode, offset + done, size) == 0) done += size;
        else if (errno != EINTR) error = errno;
    }
    Py_END_ALLOW_THREADS
    return Py_BuildValue("iL", error, done);
}

static PyMethodDef methods[] = {
    {"fallocate", native_fallocate, METH_VARARGS, "reserve space in steps -> (errno, bytes)"},
    {"locate", (PyCFunction)(void (*)(void))native_locate, METH_FASTCALL, "look up keys in the table of an index"},
    {"insert", (PyCFunction)(void (*)(void))native_insert, METH_FASTCALL, "put rows into the table of an index"},
    {"pool", native_pool, METH_O, "pool(threads) -> threads that move batches"},
    {"move", (PyCFunction)(void (*)(void))native_move, METH_FASTCALL, "move a batch -> (errno, published)"},
    {"crc32c", native_crc32c, METH_VARARGS, "crc32c(data, crc=0)"},
    {"record_crcs", native_record_crcs, METH_VARARGS, "record_crcs(records, out)"},
    {"crc_kind", native_crc_kind, METH_NOARGS, "the instructions that checksums are computed with"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Moves batches without the GIL.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    journal_type = PyType_FromSpec(&journal_spec);
    if (!module || !journal_type) return NULL;
    Py_INCREF(journal_type);
    if (PyModule_AddObject(module, "Journal", journal_type)) return NULL;
    return module;
}
