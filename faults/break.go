package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"example.com/redislock/faults/history"
)

// breakThings does what the schedule says and heals it all before it returns.
func (c *campaign) breakThings(ctx context.Context) error {
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		fatal []error
		began = time.Now()
	)
	for _, s := range schedule(c.class, c.seed, c.workers, c.duration) {
		if !sleep(ctx, time.Until(began.Add(s.at))) {
			break
		}
		wg.Go(func() {
			if err := c.do(ctx, s); err != nil {
				mu.Lock()
				defer mu.Unlock()
				fatal = append(fatal, fmt.Errorf("%s at %v: %w", s.fault, s.at, err))
			}
		})
	}
	wg.Wait()
	return errors.Join(fatal...)
}

// do does one fault, from its beginning to its end. A fault that finds its worker, network or server in the hands of
// another one is left out.
func (c *campaign) do(ctx context.Context, s step) error {
	w := c.slots[s.worker]
	f := history.Record{Kind: history.KindFault, Fault: s.fault, T: history.Now(), Process: w.name}
	note := func() {
		f.Until = history.Now()
		c.history.Add(f)
	}
	switch s.fault {
	case faultKill, faultShutdown:
		if !w.mu.TryLock() {
			return nil
		}
		defer w.mu.Unlock()
		c.end(w, s.fault == faultKill)
		note()
		sleep(ctx, s.lasts)
		return c.startWorker(w)
	case history.FaultPause:
		if !w.mu.TryLock() {
			return nil
		}
		defer w.mu.Unlock()
		f.Process, f.T = w.current, history.Now()
		w.process.signal(syscall.SIGSTOP)
		sleep(ctx, s.lasts)
		w.process.signal(syscall.SIGCONT)
		note()
	case faultCut, faultRefuse, faultHangUp, faultHangDown, faultHang, faultLatency, faultThrottle:
		if !w.network.TryLock() {
			return nil
		}
		defer w.network.Unlock()
		f.T = history.Now()
		w.proxy.set(troubleOf(s))
		if s.fault == faultCut || s.fault == faultRefuse {
			w.proxy.cut()
		}
		sleep(ctx, s.lasts)
		w.proxy.set(trouble{})
		note()
	case faultLoseAcquire, faultLoseExtend, faultLoseRelease, faultHushAcquire, faultHushExtend, faultHushRelease:
		_, verbName, _ := strings.Cut(s.fault, history.FaultSwallow)
		w.proxy.swallow(verb(verbName), strings.HasPrefix(s.fault, history.FaultOneReply))
		f.Until = history.Now() + int64(faultSwallowWindow)
		c.history.Add(f)
	case history.FaultLossy, faultDurable:
		if !c.locks.mu.TryLock() {
			return nil
		}
		defer c.locks.mu.Unlock()
		f.Process, f.T = "", history.Now()
		c.locks.process.kill()
		note() // what is lost is lost now
		sleep(ctx, s.lasts)
		err := c.locks.up(context.WithoutCancel(ctx))
		f.Fault = faultDown
		note()
		return err
	case faultScripts, history.FaultFlush, faultClientPause, history.FaultDelete, history.FaultSteal:
		f.Process = ""
		return c.command(ctx, s, f)
	default:
		return errors.New("unknown fault")
	}
	return nil
}

func troubleOf(s step) trouble {
	switch s.fault {
	case faultRefuse:
		return trouble{refuse: true}
	case faultHangUp:
		return trouble{hangUp: true}
	case faultHangDown:
		return trouble{hangDn: true}
	case faultHang:
		return trouble{hangUp: true, hangDn: true}
	case faultLatency: // each way, so that some acquires take longer than a quarter of the TTL
		return trouble{delay: time.Duration(float64(ttl/4) * s.pick)}
	case faultThrottle: // an acquire has some 300 bytes
		return trouble{perByte: time.Duration(float64(time.Millisecond) * s.pick)}
	}
	return trouble{}
}

// command does what somebody does to Redis itself. It is left out while the server is down.
func (c *campaign) command(ctx context.Context, s step, f history.Record) error {
	if !c.locks.mu.TryLock() {
		return nil
	}
	defer c.locks.mu.Unlock()
	rdb := c.locks.client
	var err error
	f.T = history.Now()
	switch s.fault {
	case faultScripts:
		err = rdb.ScriptFlush(ctx).Err()
	case history.FaultFlush:
		err = rdb.FlushAll(ctx).Err()
	case faultClientPause:
		if err = rdb.Do(ctx, "client", "pause", s.lasts.Milliseconds(), "all").Err(); err == nil {
			sleep(ctx, s.lasts)
		}
	case history.FaultDelete, history.FaultSteal:
		keys, listErr := c.lockKeys(ctx)
		if listErr != nil {
			err = listErr
			break
		}
		keys = slices.DeleteFunc(keys, lockKey.done)
		if len(keys) == 0 {
			return nil
		}
		f.Key, f.T = keys[int(s.pick*float64(len(keys)))].name, history.Now()
		if s.fault == history.FaultDelete {
			err = rdb.Del(ctx, f.Key).Err()
		} else {
			err = rdb.Set(ctx, f.Key, `redislock/1 {"task_id":"thief","host":"elsewhere","pid":1,"since":"2025-01-01T00:00:00Z","token":"stolen"}`, ttl/2).Err()
		}
	}
	if ctx.Err() != nil {
		err = nil // the campaign is over; the fault may have been done all the same
	}
	f.Until = history.Now()
	c.history.Add(f)
	return err
}
