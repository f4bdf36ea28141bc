package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// nativeRow is what one way to extend or release a lock costs on one server. A form that the server doesn't know has no samples.
type nativeRow struct {
	server, verb, form string
	micros             samples // per call, as one goroutine of the client sees it
	cpu                samples // of the server, in microseconds per call
}

// form is a way to extend or release a lock that must still be ours.
type form struct {
	verb, name string
	command    string // as the server counts it
	do         func(ctx context.Context, rdb *redis.Client, key, value string) error
}

const lockMillis = 60_000 // the TTL of the locks that are timed

var extendScript = redis.NewScript(`if redis.call("get", KEYS[1]) == ARGV[1] then return redis.call("pexpire", KEYS[1], ARGV[2]) else return 0 end`)

// forms are the scripts, then what newer servers have instead.
var forms = []form{
	{"release", "EVALSHA", "evalsha", func(ctx context.Context, rdb *redis.Client, key, value string) error {
		return releaseScript.Run(ctx, rdb, []string{key}, value).Err()
	}},
	{"release", "DELIFEQ", "delifeq", func(ctx context.Context, rdb *redis.Client, key, value string) error {
		return rdb.Do(ctx, "delifeq", key, value).Err()
	}},
	{"release", "DELEX IFEQ", "delex", func(ctx context.Context, rdb *redis.Client, key, value string) error {
		return rdb.Do(ctx, "delex", key, "ifeq", value).Err()
	}},
	{"extend", "EVALSHA", "evalsha", func(ctx context.Context, rdb *redis.Client, key, value string) error {
		return extendScript.Run(ctx, rdb, []string{key}, value, lockMillis).Err()
	}},
	{"extend", "SET IFEQ", "set", func(ctx context.Context, rdb *redis.Client, key, value string) error {
		return rdb.Do(ctx, "set", key, value, "ifeq", value, "px", lockMillis).Err()
	}},
}

// nativeForms compares the forms on every server that is found.
func nativeForms(ctx context.Context, env *environment) ([]nativeRow, error) {
	programs, err := serverPrograms(env.program)
	if err != nil {
		return nil, fmt.Errorf("bench: find servers: %w", err)
	}
	var rows []nativeRow
	for _, program := range programs {
		more, err := formsOf(ctx, env, program)
		if err != nil {
			return nil, fmt.Errorf("bench: compare the forms on %s: %w", filepath.Base(program), err)
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// serverPrograms finds the program given, the system's redis-server, and what .ci/servers.sh fetches: into REDISLOCK_SERVERS or,
// without that, beside this module.
func serverPrograms(given string) ([]string, error) {
	dir := os.Getenv("REDISLOCK_SERVERS")
	if dir == "" {
		dir = filepath.Join("..", ".servers")
	}
	names := []string{given, "redis-server"}
	for _, pattern := range []string{"redis-*", "valkey-*"} {
		more, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return nil, err
		}
		names = append(names, more...)
	}
	var programs []string
	for _, name := range names {
		path, err := exec.LookPath(name)
		if err != nil {
			continue // not there, or not a program
		}
		if path, err = filepath.Abs(path); err != nil {
			return nil, err
		}
		if !slices.Contains(programs, path) {
			programs = append(programs, path)
		}
	}
	return programs, nil
}

func formsOf(ctx context.Context, env *environment, program string) (rows []nativeRow, err error) {
	s, err := startServer(program)
	if err != nil {
		return nil, err
	}
	env.progress("native forms on %s", s.version)
	rdb := client(s.addr)
	defer func() { err = errors.Join(err, rdb.Close(), s.stop()) }()
	known := make(map[string]form)
	var names []string
	for _, f := range forms {
		ok, err := knows(ctx, rdb, f)
		if err != nil {
			return nil, err
		}
		if name := f.verb + " " + f.name; ok {
			known[name], names = f, append(names, name)
		}
	}
	cpu := make(map[string]samples)
	micros, err := interleave(env.rounds, names, func(name string, round int) (float64, error) {
		client, server, err := timeForm(ctx, rdb, known[name], env.count(4000))
		if round > 0 {
			cpu[name] = append(cpu[name], server)
		}
		return client, err
	})
	if err != nil {
		return nil, err
	}
	for _, f := range forms {
		name := f.verb + " " + f.name
		rows = append(rows, nativeRow{s.version, f.verb, f.name, micros[name], cpu[name]})
	}
	return rows, nil
}

// knows tries a form on a lock, since versions say little.
func knows(ctx context.Context, rdb *redis.Client, f form) (bool, error) {
	if err := rdb.Set(ctx, "try", "v", time.Minute).Err(); err != nil {
		return false, err
	}
	err := f.do(ctx, rdb, "try", "v")
	var reply redis.Error
	if errors.As(err, &reply) {
		return false, nil
	}
	return err == nil, err
}

// timeForm returns the microseconds per call, for the client and for the server. n is even.
func timeForm(ctx context.Context, rdb *redis.Client, f form, n int) (micros, cpu float64, err error) {
	keys := make([]string, n)
	const value = "0123456789abcdef0123456789abcdef" // about as long as a lock's
	_, err = rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := range keys {
			keys[i] = "native" + strconv.Itoa(i)
			p.Set(ctx, keys[i], value, lockMillis*time.Millisecond)
		}
		return nil
	})
	if err != nil {
		return 0, 0, err
	}
	if err := rdb.ConfigResetStat(ctx).Err(); err != nil {
		return 0, 0, err
	}
	began := time.Now()
	for _, key := range keys {
		if err := f.do(ctx, rdb, key, value); err != nil {
			return 0, 0, err
		}
	}
	took := time.Since(began)
	perPair, err := commandMicros(ctx, rdb, []string{f.command}, n/2)
	return float64(took.Microseconds()) / float64(n), perPair / 2, err
}
