package main

import (
	"bytes"
	"fmt"
	"html"
)

// bars draws a bar of each group for each name, as SVG in the style of chart.
func bars(title string, groups, names []string, value func(group int, name string) float64) []byte {
	const from, to, first, thick, gap = 200.0, 690.0, 74.0, 14.0, 12.0 // places of the bars
	most := 0.0
	for g := range groups {
		for _, name := range names {
			most = max(most, value(g, name))
		}
	}
	height := int(first + float64(len(names))*(float64(len(groups))*thick+gap))
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img">`+"\n<title>%s</title>\n%s", plotWidth, height, html.EscapeString(title), plotStyle)
	fmt.Fprintf(&b, `<rect class="page" width="%d" height="%d"/>`+"\n", plotWidth, height)
	bar := func(color int, x, y, length float64) {
		fmt.Fprintf(&b, `<path class="c%d" stroke-width="%.0f" d="M%.0f,%.1fh%.1f"/>`+"\n", color, thick-2, x, y, length)
	}
	text(&b, from, 24, "title", title)
	for g, group := range groups {
		x := from + float64(g)*200
		bar(g, x, 46, 16)
		text(&b, x+24, 50, "group", group)
	}
	y := first
	for _, name := range names {
		text(&b, from-8, y+float64(len(groups)-1)*thick/2+4, "end", name)
		for g := range groups {
			v := value(g, name)
			length := (to - from) * v / most
			bar(g, from, y, length)
			text(&b, from+length+6, y+4, "value", num(v))
			y += thick
		}
		y += gap
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}
