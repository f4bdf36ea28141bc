package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
)

// sends is what a side sends for a pair, one of them for the acquire and one for the release. The server also counts what its
// scripts call, a second time, as commands of that name.
var sends = map[string][]string{
	bare:     {"set", "evalsha"},
	asOurs:   {"set", "evalsha"},
	ours:     {"set", "evalsha"},
	redsyncL: {"set", "evalsha"},
	bsm:      {"evalsha"},
	bsmAlive: {"evalsha"},
	rueidisL: {"evalsha"},
}

// serverCPU measures the server's processor time per pair in microseconds: in commands, and of its whole process. Many
// clients ask at once, since a server that sleeps between its commands measures how long it takes to wake up.
func serverCPU(ctx context.Context, env *environment) (commands, process map[string]samples, err error) {
	env.progress("processor time of the server")
	const clients = 64
	opened, closeAll, err := openAll(plain, env.s.addr, clients)
	if err != nil {
		return nil, nil, err
	}
	defer closeAll()
	rdb := client(env.s.addr)
	defer rdb.Close()
	process = make(map[string]samples)
	commands, err = interleave(env.pairRounds(), plain, func(name string, round int) (float64, error) {
		if err := repeat(ctx, opened[name], 1); err != nil { // loads scripts
			return 0, err
		}
		before, err := serverTime(ctx, rdb)
		if err != nil {
			return 0, err
		}
		if err := rdb.ConfigResetStat(ctx).Err(); err != nil {
			return 0, err
		}
		s, n := counting(opened[name])
		if _, err := pairMicros(ctx, s, clients, env.window()); err != nil {
			return 0, err
		}
		after, err := serverTime(ctx, rdb)
		if err != nil {
			return 0, err
		}
		if round > 0 {
			process[name] = append(process[name], (after-before)*1e6/float64(n.Load()))
		}
		return commandMicros(ctx, rdb, sends[name], int(n.Load()))
	})
	return commands, process, err
}

// counting returns the side, and how many pairs it has done.
func counting(s side) (side, *atomic.Int64) {
	var n atomic.Int64
	do := s.do
	s.do = func(ctx context.Context, name string, work func(context.Context) error) error {
		n.Add(1)
		return do(ctx, name, work)
	}
	return s, &n
}

// commandMicros is the time per pair in the commands that were sent. It fails if those are not two per pair.
func commandMicros(ctx context.Context, rdb *redis.Client, sent []string, pairs int) (float64, error) {
	info, err := rdb.InfoMap(ctx, "commandstats").Result()
	if err != nil {
		return 0, err
	}
	calls, micros := 0, 0
	for _, command := range sent {
		for field := range strings.SplitSeq(info["Commandstats"]["cmdstat_"+command], ",") {
			what, value, _ := strings.Cut(field, "=")
			switch v, _ := strconv.Atoi(value); what {
			case "calls":
				calls += v
			case "usec":
				micros += v
			}
		}
	}
	if calls != 2*pairs {
		return 0, fmt.Errorf("the server counted %d commands for %d pairs: %v", calls, pairs, info["Commandstats"])
	}
	return float64(micros) / float64(pairs), nil
}
