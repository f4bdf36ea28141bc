// Command bench measures what a lock costs, beside the bare commands and other packages for locks in Redis. It starts a Redis
// server of its own, prints what it finds, and writes it to a page:
//
//	go run .
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const minRounds = 7

// environment is what all measurements share.
type environment struct {
	program string // of the Redis server
	s       *server
	rounds  int
	quick   bool // short windows and small counts, to see that it works
}

func main() {
	var env environment
	flag.StringVar(&env.program, "server", "redis-server", "program of the Redis server")
	flag.IntVar(&env.rounds, "rounds", minRounds, "rounds of each measurement, at least 7")
	flag.BoolVar(&env.quick, "quick", false, "measure next to nothing, to see that it works, and write only where -o says")
	page := flag.String("o", "", "page to write; its plots come beside it (default ../docs/performance.md)")
	flag.Parse()
	if *page == "" && !env.quick {
		*page = "../docs/performance.md"
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, &env, *page); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run measures all rows on a server that it starts and stops, and writes the page unless its path is empty.
func run(ctx context.Context, env *environment, page string) (err error) {
	if env.quick {
		env.rounds = 2
	} else if env.rounds < minRounds {
		return fmt.Errorf("bench: configure -rounds: %d is less than %d", env.rounds, minRounds)
	}
	if env.s, err = startServer(env.program); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, env.s.stop()) }()
	r, err := measure(ctx, env)
	if err != nil || page == "" {
		return err
	}
	return r.write(page)
}

// measure fills the results row by row, and prints each when it is there.
func measure(ctx context.Context, env *environment) (*results, error) {
	r := &results{Machine: describeMachine(env), holdings: holdings(env)}
	for _, row := range []struct {
		fill  func() (err error)
		table func() table
	}{
		{func() (err error) { r.pairs, err = pairs(ctx, env); return }, r.Pairs},
		{func() (err error) { r.tasks, err = tasks(ctx, env); return }, r.Tasks},
		{func() (err error) { r.allocs, r.bytes, err = allocations(ctx, env); return }, r.Allocations},
		{func() (err error) { r.commands, r.process, err = serverCPU(ctx, env); return }, r.Server},
		{func() (err error) { r.skips, err = skipTrips(ctx, env); return }, r.Trips},
		{func() (err error) { r.handOver, err = handOvers(ctx, env); return }, r.HandOvers},
		{func() (err error) { r.held, err = heldLocks(ctx, env); return }, r.Held},
		{func() (err error) { r.native, err = nativeForms(ctx, env); return }, r.Native},
		{func() error { return nil }, r.Targets}, // of all of them
	} {
		if err := errors.Join(flush(ctx, env.s.addr), row.fill()); err != nil {
			return nil, err
		}
		row.table().print(os.Stdout)
	}
	return r, nil
}

// progress says what is being measured.
func (e *environment) progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, time.Now().Format("15:04:05 ")+format+"\n", args...)
}

// window is how long the cost of a pair is measured each time, in pairRounds: short and often, so that all sides meet what
// neighbours do to the machine.
func (e *environment) window() time.Duration {
	if e.quick {
		return 10 * time.Millisecond
	}
	return 100 * time.Millisecond
}

func (e *environment) pairRounds() int { return 5 * e.rounds }

// taskRounds is in how many rounds the tasks per second are measured.
func (e *environment) taskRounds() int { return 3 * e.rounds }

// count is how often something is done for one measurement.
func (e *environment) count(n int) int {
	if e.quick {
		return n / 20
	}
	return n
}
