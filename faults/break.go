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
	f := record{Kind: kindFault, Fault: s.fault, T: now(), Process: w.name}
	note := func() {
		f.Until = now()
		c.history.add(f)
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
	case faultPause:
		if !w.mu.TryLock() {
			return nil
		}
		defer w.mu.Unlock()
		f.Process, f.T = w.current, now()
		w.process.signal(syscall.SIGSTOP)
		sleep(ctx, s.lasts)
		w.process.signal(syscall.SIGCONT)
		note()
	case faultCut, faultRefuse, faultHangUp, faultHangDown, faultHang, faultLatency, faultThrottle:
		if !w.network.TryLock() {
			return nil
		}
		defer w.network.Unlock()
		f.T = now()
		w.proxy.set(troubleOf(s))
		if s.fault == faultCut || s.fault == faultRefuse {
			w.proxy.cut()
		}
		sleep(ctx, s.lasts)
		w.proxy.set(trouble{})
		note()
	case faultLoseAcquire, faultLoseExtend, faultLoseRelease, faultHushAcquire, faultHushExtend, faultHushRelease:
		_, verbName, _ := strings.Cut(s.fault, faultSwallow)
		w.proxy.swallow(verb(verbName), strings.HasPrefix(s.fault, faultOneReply))
		f.Until = now() + int64(faultSwallowWindow)
		c.history.add(f)
	case faultLossy, faultDurable:
		if !c.locks.mu.TryLock() {
			return nil
		}
		defer c.locks.mu.Unlock()
		f.Process, f.T = "", now()
		c.locks.process.kill()
		note() // what is lost is lost now
		sleep(ctx, s.lasts)
		err := c.locks.up(context.WithoutCancel(ctx))
		f.Fault = faultDown
		note()
		return err
	case faultScripts, faultFlush, faultClientPause, faultDelete, faultSteal:
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
func (c *campaign) command(ctx context.Context, s step, f record) error {
	if !c.locks.mu.TryLock() {
		return nil
	}
	defer c.locks.mu.Unlock()
	rdb := c.locks.client
	var err error
	f.T = now()
	switch s.fault {
	case faultScripts:
		err = rdb.ScriptFlush(ctx).Err()
	case faultFlush:
		err = rdb.FlushAll(ctx).Err()
	case faultClientPause:
		if err = rdb.Do(ctx, "client", "pause", s.lasts.Milliseconds(), "all").Err(); err == nil {
			sleep(ctx, s.lasts)
		}
	case faultDelete, faultSteal:
		keys, listErr := c.lockKeys(ctx)
		if listErr != nil {
			err = listErr
			break
		}
		keys = slices.DeleteFunc(keys, lockKey.done)
		if len(keys) == 0 {
			return nil
		}
		f.Key, f.T = keys[int(s.pick*float64(len(keys)))].name, now()
		if s.fault == faultDelete {
			err = rdb.Del(ctx, f.Key).Err()
		} else {
			err = rdb.Set(ctx, f.Key, `redislock/1 {"task_id":"thief","host":"elsewhere","pid":1,"since":"2025-01-01T00:00:00Z","token":"stolen"}`, ttl/2).Err()
		}
	}
	if ctx.Err() != nil {
		err = nil // the campaign is over; the fault may have been done all the same
	}
	f.Until = now()
	c.history.add(f)
	return err
}
