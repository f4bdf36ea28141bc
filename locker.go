package redislock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"example.com/redislock/internal/store"
)

// Locker makes locks in one Redis, or with pgfence in one database, with one set of options. All methods are safe for concurrent
// use. An idle Locker owns no goroutine or connection and, a quarter of the TTL after its last call, no timer. It never closes the
// client. The zero Locker is not usable; call New.
type Locker struct {
	config
	store         store.Store
	bulk          store.Bulk  // the store, if it extends many locks at once
	prompt        atomic.Bool // its claims may be made by the goroutine that wants them
	promptRelease bool        // and so may its releases
	host          string
	pid           int

	mu      sync.Mutex
	closing chan struct{}    // closed by Shutdown
	gaveUp  bool             // Shutdown has stopped waiting: no lock may be handed out any more
	busy    int              // locks handed out and calls in flight
	idle    chan struct{}    // closed when busy drops to 0, for Shutdown; nil while nobody waits
	locks   []*Lock          // handed out and not yet ended; each knows its place
	latest  map[string]*Lock // of locks, by key: after a loss there may be two
	timers  sync.Pool        // of stopped *time.Timer
	alarms  alarms
	waits   map[string]*waiters // by key, those that want it
}

// New returns a Locker on rdb: a client, a failover client or a cluster client, of Redis 7.0 or later or Valkey. A *redis.Ring
// is refused, since it moves keys when a shard drops and would give one lock to two. New does not talk to Redis. It fails
// on a nil client and on an option that cannot be used.
func New(rdb redis.UniversalClient, opts ...Option) (*Locker, error) {
	switch v := reflect.ValueOf(rdb); {
	case !v.IsValid(), v.Kind() == reflect.Pointer && v.IsNil():
		return nil, errors.New("redislock: configure: the Redis client is nil")
	case !v.Comparable():
		return nil, fmt.Errorf("redislock: configure: the Redis client is a %T, which cannot be compared; pass a pointer to it", rdb)
	}
	if _, ring := rdb.(*redis.Ring); ring {
		return nil, errors.New("redislock: configure: *redis.Ring moves keys when a shard drops, so it cannot hold locks; " +
			"use a client, a failover client or a cluster client")
	}
	return NewOn(&redisStore{rdb: rdb}, opts...)
}

// NewOn is New for another place to keep locks. Its store comes from a module of this project, such as pgfence; there is no way
// to bring one's own.
func NewOn(s store.Store, opts ...Option) (*Locker, error) {
	c, err := newConfig(opts)
	if err != nil {
		return nil, err
	}
	if s.Transactional() && c.fencing {
		return nil, fmt.Errorf("redislock: configure WithFencing: a lock in %s needs no number: nothing is written after its loss", s.Name())
	}
	if s.Transactional() && c.failOpen {
		return nil, fmt.Errorf("redislock: configure WithFailOpen: a lock in %s can't do without it: the work is part of its transaction", s.Name())
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	l := &Locker{
		config:  c,
		store:   s,
		host:    host,
		pid:     os.Getpid(),
		closing: make(chan struct{}),
		latest:  make(map[string]*Lock),
		waits:   make(map[string]*waiters),
	}
	l.alarms.awake = l.awake
	if l.bulk = s.Bulk(); l.bulk != nil && c.ttl >= promptTTL {
		claims, releases := l.bulk.Prompt(c.ttl / 4)
		l.prompt.Store(claims)
		l.promptRelease = releases
	}
	return l, nil
}

// Name returns the lock name of a task, for TryAcquire, Do, Holder and ForceRelease. The context must be a handler's where the
// KeyFunc needs the queue or the task ID (PerQueue, ByTaskID). Its errors are NoLock, those of the KeyFunc,
// and ErrInvalidKey for an empty name.
func (l *Locker) Name(ctx context.Context, task *asynq.Task) (string, error) {
	name, err := l.config.key(ctx, task)
	switch {
	case errors.Is(err, NoLock), errors.Is(err, ErrInvalidKey):
		return "", err
	case err != nil:
		return "", fmt.Errorf("redislock: derive key of task type %q: %w", task.Type(), err)
	case name == "":
		return "", fmt.Errorf("%w: the name of a task of type %q is empty", ErrInvalidKey, task.Type())
	}
	return name, nil
}

// redisKey returns the key of a name. The braces make all that is kept for one name share a cluster slot.
func (l *Locker) redisKey(name string) (string, error) {
	name, err := lockName(name)
	if err != nil {
		return "", err
	}
	return l.prefix + "{" + name + "}", nil
}

// TryAcquire tries once to take the lock of a name. It fails with a *HeldError when the lock is taken or its work done, with
// ErrUnavailable when the lock store can't be asked or takes over TTL/4, with ErrInvalidKey for an empty name, with ErrClosed after
// Shutdown. The context bounds the try only (see Timing): the lock is held and extended until Release, which must be called.
// A lock that this Locker holds itself is refused without asking.
func (l *Locker) TryAcquire(ctx context.Context, name string) (*Lock, error) {
	key, err := l.redisKey(name)
	if err != nil {
		return nil, err
	}
	return l.acquire(ctx, context.WithoutCancel(ctx), key, l.self(ctx, ""), time.Now())
}

// Do takes the lock of a name, runs fn with a context that ends when ctx does or the lock is lost, and releases the lock,
// leaving the done marker of WithDoneFor when fn returned nil: fn must return an error if it stops because ctx ended. Do fails
// like TryAcquire, without running fn; otherwise it returns what fn returned, and an error also matches ErrLost if the lock was
// lost. The lock is released when fn panics, too. Under a row lock, Do also fails when the commit does.
func (l *Locker) Do(ctx context.Context, name string, fn func(context.Context) error) error {
	key, err := l.redisKey(name)
	if err != nil {
		return err
	}
	lock, err := l.acquire(ctx, ctx, key, l.self(ctx, ""), time.Now())
	if err != nil {
		return err
	}
	return lock.hold(fn)
}

// Holder returns who holds the lock of a name, or whose done marker is there; ok is false when the lock is free. It fails
// when the lock store does, and when something is at the key that this version can't read.
func (l *Locker) Holder(ctx context.Context, name string) (h Holder, ok bool, err error) {
	key, err := l.redisKey(name)
	if err != nil {
		return Holder{}, false, err
	}
	value, ok, err := l.store.Read(ctx, key)
	if err != nil || !ok {
		return Holder{}, false, err
	}
	if h, err = decodeValue(value); err != nil {
		return Holder{}, false, fmt.Errorf("redislock: read lock %s: %w", key, err)
	}
	return h, true, nil
}

// ForceRelease frees the lock of a name or removes its done marker, whoever it belongs to. A holder that still runs sees
// ErrLost within TTL/3 (under a row lock, not before a statement or rows that are open end). Freeing a lock that is not held is no error.
func (l *Locker) ForceRelease(ctx context.Context, name string) error {
	key, err := l.redisKey(name)
	if err != nil {
		return err
	}
	if err := l.store.Free(ctx, key); err != nil {
		return err
	}
	l.mu.Lock()
	delete(l.latest, key)
	l.mu.Unlock()
	l.wake(key)
	return nil
}

// Shutdown makes the Locker take no more locks, waits until those it has are released, and returns nil. Call it after the
// asynq server's Shutdown or Run has returned: tasks that still arrive get ErrClosed, are put back, and run elsewhere; on its
// last attempt a task stays until its context ends, since an error would archive it. When
// ctx ends first, the contexts of the locks that are still held and have not ended before (asynq's shutdown ends those of its
// handlers) are cancelled with a cause that matches ErrClosed, the locks are abandoned, so that they lapse within one TTL, and
// Shutdown returns ctx's error. It waits for handlers that run without a lock, too. It may be called again.
func (l *Locker) Shutdown(ctx context.Context) error {
	l.mu.Lock()
	if !l.closed() {
		close(l.closing)
	}
	if l.busy > 0 && l.idle == nil {
		l.idle = make(chan struct{})
	}
	idle := l.idle
	l.mu.Unlock()
	if idle == nil {
		return nil
	}
	if waitFor(ctx, idle) {
		return nil
	}
	l.mu.Lock()
	l.gaveUp = true
	left := slices.Clone(l.locks)
	l.mu.Unlock()
	for _, k := range left {
		k.giveUp(fmt.Errorf("%w: lock %s is still held", ErrClosed, k.key))
	}
	return ctx.Err()
}

// closed reports whether Shutdown has been called.
func (l *Locker) closed() bool {
	select {
	case <-l.closing:
		return true
	default:
		return false
	}
}

// enter counts a new lock unless the Locker is closed. begin does so on behalf of what is counted already.
func (l *Locker) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed() {
		return false
	}
	l.busy++
	return true
}

// register notes a lock that is about to be handed out. It refuses one that was on its way when Shutdown stopped waiting.
func (l *Locker) register(k *Lock) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.gaveUp {
		k.place = int32(len(l.locks))
		l.locks, l.latest[k.key] = append(l.locks, k), k
	}
	return !l.gaveUp
}

// unregister forgets a lock that has been released, and wakes those that wait for it here.
func (l *Locker) unregister(k *Lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if int(k.place) < len(l.locks) && l.locks[k.place] == k { // else it was refused
		last := len(l.locks) - 1
		l.locks[k.place], l.locks[last].place = l.locks[last], k.place
		l.locks[last] = nil
		l.locks = l.locks[:last]
	}
	if l.latest[k.key] == k {
		delete(l.latest, k.key)
	}
	l.ring(k.key)
}

// holder returns who holds a lock if it is this Locker, which then needs not ask for it.
func (l *Locker) holder(key string) (h Holder, ok bool) {
	l.mu.Lock()
	k := l.latest[key]
	l.mu.Unlock()
	if k == nil || !k.isValid() {
		return Holder{}, false
	}
	return k.self, true
}

func (l *Locker) begin() {
	l.mu.Lock()
	l.busy++
	l.mu.Unlock()
}

// leave undoes one enter or begin.
func (l *Locker) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.busy--; l.busy == 0 && l.idle != nil {
		close(l.idle)
		l.idle = nil
	}
}

// spawn runs fn in a goroutine that Shutdown waits for.
func (l *Locker) spawn(fn func()) {
	l.begin()
	go func() {
		defer l.leave()
		fn()
	}()
}

// self is what this process writes as the holder of a lock for the task in ctx.
func (l *Locker) self(ctx context.Context, taskType string) Holder {
	h := Holder{TaskType: taskType, Host: l.host, PID: l.pid}
	h.TaskID, _ = asynq.GetTaskID(ctx)
	h.Queue, _ = asynq.GetQueueName(ctx)
	if around, ok := FromContext(ctx); ok && taskType == "" && around.self.sameTask(h) {
		h.TaskType = around.self.TaskType
	}
	return h
}
