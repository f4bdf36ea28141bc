package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"text/tabwriter"
	"time"

	"example.com/redislock"
	"github.com/hibiken/asynq"
)

//go:embed sales.csv
var sales []byte

// reporter makes the nightly report.
type reporter struct {
	dir string
	log *slog.Logger
	// gather stands for the part of a real report that takes long. It must return when its context ends.
	gather func(ctx context.Context, date string) error
}

// ProcessTask handles report:nightly. The payload may name the day, {"date":"2025-03-01"}; without one it is today, in UTC.
func (r *reporter) ProcessTask(ctx context.Context, task *asynq.Task) error {
	date, err := dateOf(task.Payload())
	if err != nil {
		return fmt.Errorf("read payload: %w: %w", err, asynq.SkipRetry) // another try would not help
	}
	r.log.InfoContext(ctx, "making the report: this task got the lock", "date", date)
	if r.gather != nil {
		if err := r.gather(ctx, date); err != nil {
			return fmt.Errorf("gather sales of %s: %w", date, err)
		}
	}
	text, err := totals(date, bytes.NewReader(sales))
	if err != nil {
		return fmt.Errorf("add up sales of %s: %w", date, err)
	}
	// The line before the side effect: after a long pause of this process, another may have the lock by now.
	if lock, ok := redislock.FromContext(ctx); ok {
		if err := lock.Check(ctx); err != nil {
			return err
		}
	}
	path := filepath.Join(r.dir, date+".txt")
	if err := writeFile(path, text); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	r.log.InfoContext(ctx, "report made", "date", date, "file", path)
	return nil
}

// dateOf returns the day to report on. It becomes a file name, so nothing but a date will do.
func dateOf(payload []byte) (string, error) {
	p := struct{ Date string }{time.Now().UTC().Format(time.DateOnly)}
	if len(payload) > 0 {
		if err := json.Unmarshal(payload, &p); err != nil {
			return "", errors.New("it is not JSON of the form {\"date\":\"2025-03-01\"}") // the decoder's error would quote it
		}
	}
	if _, err := time.Parse(time.DateOnly, p.Date); err != nil {
		return "", errors.New("its date is not of the form 2025-03-01")
	}
	return p.Date, nil
}

// totals adds up the revenue of each region.
func totals(date string, data io.Reader) ([]byte, error) {
	rows, err := csv.NewReader(data).ReadAll()
	if err != nil {
		return nil, err
	}
	sum, all := map[string]int{}, 0
	for i, row := range rows {
		if i == 0 {
			continue // the header
		}
		revenue, err := strconv.Atoi(row[2])
		if err != nil {
			return nil, fmt.Errorf("row %d: %w", i+1, err)
		}
		sum[row[0]] += revenue
		all += revenue
	}
	var text bytes.Buffer
	fmt.Fprintf(&text, "Sales report %s\n\n", date)
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, region := range slices.Sorted(maps.Keys(sum)) {
		fmt.Fprintf(table, "%s\t%d\t\n", region, sum[region])
	}
	fmt.Fprintf(table, "all\t%d\t\n", all)
	if err := table.Flush(); err != nil {
		return nil, err
	}
	return text.Bytes(), nil
}

// writeFile puts a file in place whole or not at all, so that nobody ever reads half a report.
func writeFile(path string, text []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".report-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(text)
	if err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
