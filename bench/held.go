package main

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"example.com/redislock"
)

// heldRow is what it costs one side to hold many locks at once. A side that can't hold so many has no samples.
type heldRow struct {
	side       string
	locks      int
	heap       samples // bytes of each lock, with stackSize for each goroutine
	goroutines samples // of each lock
	cpu        samples // client processor seconds per second of holding
	server     samples // server processor seconds per second
	lost       int     // in all rounds
}

// holding is how many locks are held, and for how long.
type holding struct {
	locks, rounds int
	ttl           time.Duration
	held          func() // if not nil, is called once all are held
}

// window is how long the processor time is taken: one extension period, in which every lock is extended once.
func (h holding) window() time.Duration { return h.ttl / 3 }

// holdings ends with a longer TTL, since taking 100,000 locks takes some seconds itself, and with fewer rounds, since each
// takes half a minute and so much work averages by itself.
func holdings(env *environment) []holding {
	const ttl = 6 * time.Second
	if env.quick {
		return []holding{{locks: 100, rounds: env.rounds, ttl: 3 * time.Second}, {locks: 1000, rounds: env.rounds, ttl: 3 * time.Second}}
	}
	return []holding{
		{locks: 100, rounds: env.rounds, ttl: ttl},
		{locks: 1000, rounds: env.rounds, ttl: ttl},
		{locks: 10_000, rounds: env.rounds, ttl: ttl},
		{locks: 100_000, rounds: min(env.rounds, 2), ttl: 5 * ttl},
	}
}

// heldLocks holds many locks in this process. All are taken as fast as possible, so that their extensions come as a burst, as
// they do where a burst of tasks took them.
func heldLocks(ctx context.Context, env *environment) ([]heldRow, error) {
	names := []string{ours, bsmAlive, redsyncAlive, rueidisL}
	var rows []heldRow
	for _, h := range holdings(env) {
		env.progress("%d held locks", h.locks)
		of := make(map[string]*heldRow)
		unable := make(map[string]bool)
		for _, name := range names {
			of[name] = &heldRow{side: name, locks: h.locks}
		}
		_, err := interleave(h.rounds, names, func(name string, round int) (float64, error) {
			if round == 0 || unable[name] {
				return 0, nil // each round has a client of its own and warms that up
			}
			err := holdMany(ctx, env.s.addr, h, of[name])
			if errors.Is(err, errUnable) {
				env.progress("%v", err)
				*of[name], unable[name], err = heldRow{side: name, locks: h.locks}, true, nil
			}
			return 0, err
		})
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			rows = append(rows, *of[name])
		}
	}
	return rows, nil
}

// errUnable says that a side failed to take so many locks in time.
var errUnable = errors.New("can't hold so many locks")

// holdMany adds one round to the row.
func holdMany(ctx context.Context, addr string, h holding, row *heldRow) (err error) {
	var lost atomic.Int64
	s, err := holder(row.side, addr, h.ttl, &lost)
	if err != nil {
		return err
	}
	watch := redis.NewClient(&redis.Options{Addr: addr})
	defer func() { err = errors.Join(err, s.close(), watch.FlushAll(context.Background()).Err(), watch.Close()) }()
	releases := make([]func(), h.locks)
	for range 10 { // opens all connections, which are not the locks' to pay for
		warm, err := takeAll(ctx, s, releases[:min(takers, h.locks)], h.ttl)
		warm()
		if err != nil {
			return err
		}
	}

	heap, goroutines, began := liveHeap(), runtime.NumGoroutine(), time.Now()
	release, err := takeAll(ctx, s, releases, h.ttl)
	defer release()
	if err != nil {
		return err
	}
	goroutinesEach := float64(runtime.NumGoroutine()-goroutines) / float64(h.locks)
	row.goroutines = append(row.goroutines, goroutinesEach)
	row.heap = append(row.heap, (liveHeap()-heap)/float64(h.locks)+goroutinesEach*stackSize)

	held, err := snapshot(ctx, watch)
	if err != nil {
		return err
	}
	if h.held != nil {
		h.held()
	}
	// Between two bursts, so that all of one is in the window, even if it takes longer than the acquires took.
	if err := pause(ctx, (h.window()-time.Since(began))/3); err != nil {
		return err
	}
	client, server, err := holdOn(ctx, watch, h.window())
	if err != nil {
		return err
	}
	row.cpu, row.server = append(row.cpu, client), append(row.server, server)
	after, err := snapshot(ctx, watch)
	if err != nil {
		return err
	}
	for k := range held {
		if !after[k] {
			row.lost++
		}
	}
	row.lost += h.locks - len(held) + int(lost.Load())
	return nil
}

// holder returns the side of a name, as its users keep locks alive. Only redislock tells what it lost.
func holder(name, addr string, ttl time.Duration, lost *atomic.Int64) (side, error) {
	switch name {
	case bsmAlive:
		return bsmSide(client(addr), ttl, true), nil
	case redsyncAlive:
		return syncSide(client(addr), ttl, true), nil
	case rueidisL:
		return rueidisSide(addr, ttl)
	}
	return ourSide(client(addr), redislock.WithTTL(ttl), redislock.WithObserver(func(_ context.Context, e redislock.Event) {
		if e.Kind == redislock.EventLost {
			lost.Add(1)
		}
	}))
}

// takers is how many goroutines take and release the locks.
const takers = 64

// takeAll takes as many locks as there is room for, within the TTL. release is for those that were taken, also after an error.
func takeAll(ctx context.Context, s side, releases []func(), within time.Duration) (release func(), err error) {
	clear(releases)
	var failed atomic.Pointer[error]
	end := time.Now().Add(within)
	each(len(releases), func(i int) {
		if failed.Load() != nil {
			return
		}
		r, err := s.hold(ctx, "held"+strconv.Itoa(i))
		if err == nil && time.Now().After(end) {
			err = fmt.Errorf("took longer than %v", within)
		}
		if err != nil {
			failed.Store(&err)
		}
		releases[i] = r
	})
	release = func() {
		each(len(releases), func(i int) {
			if releases[i] != nil {
				releases[i]()
			}
		})
	}
	if ctx.Err() != nil {
		return release, ctx.Err()
	}
	if why := failed.Load(); why != nil {
		return release, fmt.Errorf("%w: %s: take %d: %w", errUnable, s.name, len(releases), *why)
	}
	return release, nil
}

// each calls do with 0 to n-1, from all takers at once.
func each(n int, do func(i int)) {
	var next atomic.Int64
	var all sync.WaitGroup
	for range takers {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				do(i)
			}
		})
	}
	all.Wait()
}

// stackSize is the least that a goroutine needs, in bytes. The runtime's own figure for stacks cannot be used: it keeps up to a
// megabyte of those of goroutines that have ended, which is more than 1,000 locks need. With 10,000 both agree.
const stackSize = 2048

// liveHeap is the bytes of live objects.
func liveHeap() float64 {
	runtime.GC()
	runtime.GC() // what sync.Pools kept through the first
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// snapshot is all keys with their values, hashed: a map without pointers is no work for the garbage collector meanwhile.
func snapshot(ctx context.Context, rdb *redis.Client) (map[uint64]bool, error) {
	pairs := make(map[uint64]bool)
	for cursor, first := uint64(0), true; first || cursor != 0; first = false {
		keys, next, err := rdb.Scan(ctx, cursor, "*", 1000).Result()
		if err != nil {
			return nil, fmt.Errorf("scan keys: %w", err)
		}
		for batch := range slices.Chunk(keys, 1000) {
			values, err := rdb.MGet(ctx, batch...).Result()
			if err != nil {
				return nil, fmt.Errorf("read locks: %w", err)
			}
			for i, v := range values {
				if v, ok := v.(string); ok {
					pairs[maphash.Comparable(seed, [2]string{batch[i], v})] = true
				}
			}
		}
		cursor = next
	}
	return pairs, nil
}

var seed = maphash.MakeSeed()

// holdOn waits for d and returns the processor seconds per second that this process and the server took meanwhile.
func holdOn(ctx context.Context, rdb *redis.Client, d time.Duration) (client, server float64, err error) {
	began, used := time.Now(), processTime()
	before, err := serverTime(ctx, rdb)
	if err != nil {
		return 0, 0, err
	}
	if err := pause(ctx, d); err != nil {
		return 0, 0, err
	}
	after, err := serverTime(ctx, rdb)
	if err != nil {
		return 0, 0, err
	}
	took := time.Since(began).Seconds()
	return (processTime() - used) / took, (after - before) / took, nil
}

// pause waits for d, and fails if ctx ends first.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// processTime is the processor seconds that this process has used.
func processTime() float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // its arguments are right
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// serverTime is the processor seconds that the server has used.
func serverTime(ctx context.Context, rdb *redis.Client) (float64, error) {
	info, err := rdb.InfoMap(ctx, "cpu").Result()
	if err != nil {
		return 0, fmt.Errorf("read the server's processor time: %w", err)
	}
	sum := 0.0
	for _, field := range []string{"used_cpu_user", "used_cpu_sys"} {
		v, err := strconv.ParseFloat(info["CPU"][field], 64)
		if err != nil {
			return 0, fmt.Errorf("read the server's processor time: %w", err)
		}
		sum += v
	}
	return sum, nil
}
