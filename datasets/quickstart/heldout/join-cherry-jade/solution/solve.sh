#!/bin/sh
cd /app
paste -sd, cherry.txt > jade.txt
