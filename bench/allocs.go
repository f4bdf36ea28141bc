package main

import (
	"context"
	"runtime"
)

// allocations measures what a pair of acquire and release allocates in the whole process: one goroutine, garbage collection on.
func allocations(ctx context.Context, env *environment) (counts, bytes map[string]samples, err error) {
	env.progress("allocations")
	opened, closeAll, err := openAll(plain, env.s.addr, 1)
	if err != nil {
		return nil, nil, err
	}
	defer closeAll()
	n := env.count(5000)
	bytes = make(map[string]samples)
	counts, err = interleave(env.rounds, plain, func(name string, round int) (float64, error) {
		if err := repeat(ctx, opened[name], 1); err != nil { // dials
			return 0, err
		}
		var before, after runtime.MemStats
		runtime.GC() // so that each side starts with the same
		runtime.ReadMemStats(&before)
		if err := repeat(ctx, opened[name], n); err != nil {
			return 0, err
		}
		runtime.ReadMemStats(&after)
		if round > 0 {
			bytes[name] = append(bytes[name], float64(after.TotalAlloc-before.TotalAlloc)/float64(n))
		}
		return float64(after.Mallocs-before.Mallocs) / float64(n), nil
	})
	return counts, bytes, err
}
