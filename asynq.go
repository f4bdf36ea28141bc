package redislock

import (
	"context"
	"errors"
	"time"

	"github.com/hibiken/asynq"
)

// contention is the error of a task that could not run for no fault of its own. Only this package makes it, and only for a
// task whose handler did not run, so a handler cannot dodge its retry count by returning a *HeldError.
type contention struct {
	task  *asynq.Task
	err   error
	delay time.Duration
}

func (c *contention) Error() string { return c.err.Error() }
func (c *contention) Unwrap() error { return c.err }

func contended(task *asynq.Task, err error, delay time.Duration) error {
	return &contention{task, err, max(delay, minRetry)}
}

// contentionIn returns the contention in err, nil if there is none.
func contentionIn(err error) *contention {
	if err == nil { // what errors.As is given takes an allocation
		return nil
	}
	var c *contention
	errors.As(err, &c)
	return c
}

// ofHandler is the error of a handler that ran. It hides a contention of some other task, which such a handler met and
// returned, and nothing else.
type ofHandler struct{ err error }

func (e *ofHandler) Error() string        { return e.err.Error() }
func (e *ofHandler) Is(target error) bool { return errors.Is(e.err, target) }
func (e *ofHandler) As(target any) bool {
	_, hidden := target.(**contention)
	return !hidden && errors.As(e.err, target)
}

// ServerConfig returns cfg for a server whose handlers run under locks. A task that is put back because it did not get its lock
// comes again after the policy's delay, does not count as a failure, uses up none of its retries, and is not reported to cfg.ErrorHandler
// unless it ends in the archive. For every other error cfg's own IsFailure, RetryDelayFunc and ErrorHandler, or asynq's
// defaults, decide as before. Without it everything still works, but each contention costs the task one of its retries.
func ServerConfig(cfg asynq.Config) asynq.Config {
	isFailure, retryDelay, handler := cfg.IsFailure, cfg.RetryDelayFunc, cfg.ErrorHandler
	if isFailure == nil {
		isFailure = func(err error) bool { return err != nil }
	}
	if retryDelay == nil {
		retryDelay = asynq.DefaultRetryDelayFunc
	}
	cfg.IsFailure = func(err error) bool {
		return contentionIn(err) == nil && isFailure(err)
	}
	cfg.RetryDelayFunc = func(n int, err error, task *asynq.Task) time.Duration {
		if c := contentionIn(err); c != nil {
			return c.delay
		}
		return retryDelay(n, err, task)
	}
	if handler != nil {
		cfg.ErrorHandler = asynq.ErrorHandlerFunc(func(ctx context.Context, task *asynq.Task, err error) {
			if contentionIn(err) == nil || lastAttempt(ctx) || errors.Is(err, asynq.SkipRetry) {
				handler.HandleError(ctx, task, err)
			}
		})
	}
	return cfg
}
